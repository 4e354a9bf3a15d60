from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetChallengeRequest(_message.Message):
    __slots__ = ("target", "nonce")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    target: str
    nonce: bytes
    def __init__(self, target: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class GetChallengeResponse(_message.Message):
    __slots__ = ("challenge", "mac")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    challenge: bytes
    mac: bytes
    def __init__(self, challenge: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class CallProof(_message.Message):
    __slots__ = ("role", "caller", "target", "challenge", "nonce", "mac")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    role: str
    caller: str
    target: str
    challenge: bytes
    nonce: bytes
    mac: bytes
    def __init__(self, role: _Optional[str] = ..., caller: _Optional[str] = ..., target: _Optional[str] = ..., challenge: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...
