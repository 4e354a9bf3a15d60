"""The socket between two processes of one host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvtransfer.transports.common.slots import UnixListener

STRANGER = 54_321  # a user id that owns nothing


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as a second user, which only root can become")
def test_a_receiver_of_another_user_is_refused() -> None:
    """Names of such sockets have no owner: anyone can take that of an ended receiver."""
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))\n"
        "one = socket.socket(socket.AF_UNIX); one.bind('\\0pdserve-kv-' + sys.argv[2]); one.listen()\n"
        "print('ready', flush=True); one.accept(); sys.stdin.read()"
    )
    name = f"test-{os.getpid()}"
    command = [sys.executable, "-c", code, str(STRANGER), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        with pytest.raises(PermissionError, match="another user"):
            UnixListener().dial(f"pdserve-kv-{name}", "127.0.0.1:1", 5.0)
        stranger.communicate("")
