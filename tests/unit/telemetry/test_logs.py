"""Log lines carry their fields, on one line each."""

import logging

from pdserve.telemetry.logs import FieldFormatter

FORMATTER = FieldFormatter("%(levelname)s router %(name)s: %(message)s")


def line(message: str, **extra: object) -> str:
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, message, (), None, extra=extra)
    return FORMATTER.format(record)


def test_fields_stand_behind_the_message_in_their_order() -> None:
    assert line("request finished", request_id="a", ttft_s=0.25, attempts=1) == (
        "INFO router x: request finished request_id=a ttft_s=0.25 attempts=1"
    )


def test_a_message_without_fields_is_itself() -> None:
    assert line("router is up") == "INFO router x: router is up"


def test_a_field_cannot_forge_another_line_or_field() -> None:
    assert line("refused", why="gone\nERROR all=lost") == "INFO router x: refused why='gone\\nERROR all=lost'"


def test_what_a_library_stamps_on_every_record_is_no_field() -> None:
    assert line("request finished", _library_stamp=1, ttft_s=0.5) == "INFO router x: request finished ttft_s=0.5"
