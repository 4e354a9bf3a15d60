"""The example's tests run here too."""

from examples.test_with_pdserve import (
    test_a_busy_cluster_gives_no_summary as test_a_busy_cluster_gives_no_summary,
)
from examples.test_with_pdserve import test_the_answer_is_returned as test_the_answer_is_returned
from examples.test_with_pdserve import test_with_a_cluster as test_with_a_cluster
from examples.test_with_pdserve import (
    test_with_a_cluster_and_an_event_loop as test_with_a_cluster_and_an_event_loop,
)
