from pdserve.v1 import transfer_pb2 as _transfer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("version", "error")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    version: str
    error: str
    def __init__(self, version: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("rank", "flags")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    flags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., flags: _Optional[_Iterable[str]] = ...) -> None: ...

class ReachStoreRequest(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ReachStoreResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("open", "expect", "start", "push", "give_up")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    GIVE_UP_FIELD_NUMBER: _ClassVar[int]
    open: OpenEndpoint
    expect: ExpectTransfer
    start: StartTransfer
    push: PushBlocks
    give_up: GiveUpTransfer
    def __init__(self, open: _Optional[_Union[OpenEndpoint, _Mapping]] = ..., expect: _Optional[_Union[ExpectTransfer, _Mapping]] = ..., start: _Optional[_Union[StartTransfer, _Mapping]] = ..., push: _Optional[_Union[PushBlocks, _Mapping]] = ..., give_up: _Optional[_Union[GiveUpTransfer, _Mapping]] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("opened", "expected", "ended", "stats")
    class StatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OPENED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    opened: EndpointOpened
    expected: TransferExpected
    ended: RankTransferEnded
    stats: _containers.ScalarMap[str, int]
    def __init__(self, opened: _Optional[_Union[EndpointOpened, _Mapping]] = ..., expected: _Optional[_Union[TransferExpected, _Mapping]] = ..., ended: _Optional[_Union[RankTransferEnded, _Mapping]] = ..., stats: _Optional[_Mapping[str, int]] = ...) -> None: ...

class OpenEndpoint(_message.Message):
    __slots__ = ("incarnation", "is_sender")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IS_SENDER_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    is_sender: bool
    def __init__(self, incarnation: _Optional[str] = ..., is_sender: _Optional[bool] = ...) -> None: ...

class EndpointOpened(_message.Message):
    __slots__ = ("endpoint", "error")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    error: str
    def __init__(self, endpoint: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class RankTransferKey(_message.Message):
    __slots__ = ("transfer_id", "attempt", "generation")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    generation: int
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class ExpectTransfer(_message.Message):
    __slots__ = ("grant", "epochs", "content_hashes", "has_content_hashes", "deadline_s")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASHES_FIELD_NUMBER: _ClassVar[int]
    HAS_CONTENT_HASHES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    grant: _transfer_pb2.Grant
    epochs: _containers.RepeatedScalarFieldContainer[int]
    content_hashes: _containers.RepeatedScalarFieldContainer[int]
    has_content_hashes: bool
    deadline_s: float
    def __init__(self, grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., epochs: _Optional[_Iterable[int]] = ..., content_hashes: _Optional[_Iterable[int]] = ..., has_content_hashes: _Optional[bool] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class TransferExpected(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: RankTransferKey
    def __init__(self, key: _Optional[_Union[RankTransferKey, _Mapping]] = ...) -> None: ...

class StartTransfer(_message.Message):
    __slots__ = ("grant", "deadline_s", "groups", "text")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    grant: _transfer_pb2.Grant
    deadline_s: float
    groups: int
    text: SequenceText
    def __init__(self, grant: _Optional[_Union[_transfer_pb2.Grant, _Mapping]] = ..., deadline_s: _Optional[float] = ..., groups: _Optional[int] = ..., text: _Optional[_Union[SequenceText, _Mapping]] = ...) -> None: ...

class SequenceText(_message.Message):
    __slots__ = ("num_tokens", "own", "theirs")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    THEIRS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    own: _containers.RepeatedScalarFieldContainer[int]
    theirs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[int] = ..., own: _Optional[_Iterable[int]] = ..., theirs: _Optional[_Iterable[int]] = ...) -> None: ...

class PushBlocks(_message.Message):
    __slots__ = ("key", "indices", "blocks", "epochs", "content_hashes", "is_last", "first_group", "end_group")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASHES_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_GROUP_FIELD_NUMBER: _ClassVar[int]
    END_GROUP_FIELD_NUMBER: _ClassVar[int]
    key: RankTransferKey
    indices: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    content_hashes: _containers.RepeatedScalarFieldContainer[int]
    is_last: bool
    first_group: int
    end_group: int
    def __init__(self, key: _Optional[_Union[RankTransferKey, _Mapping]] = ..., indices: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., content_hashes: _Optional[_Iterable[int]] = ..., is_last: _Optional[bool] = ..., first_group: _Optional[int] = ..., end_group: _Optional[int] = ...) -> None: ...

class GiveUpTransfer(_message.Message):
    __slots__ = ("key", "error")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    key: RankTransferKey
    error: str
    def __init__(self, key: _Optional[_Union[RankTransferKey, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class RankTransferEnded(_message.Message):
    __slots__ = ("key", "outcome", "num_bytes", "early_bytes", "transfer_s", "busy_s", "exposed_s", "error", "fault", "wire_dtype")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    EARLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    key: RankTransferKey
    outcome: str
    num_bytes: int
    early_bytes: int
    transfer_s: float
    busy_s: float
    exposed_s: float
    error: str
    fault: str
    wire_dtype: str
    def __init__(self, key: _Optional[_Union[RankTransferKey, _Mapping]] = ..., outcome: _Optional[str] = ..., num_bytes: _Optional[int] = ..., early_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., error: _Optional[str] = ..., fault: _Optional[str] = ..., wire_dtype: _Optional[str] = ...) -> None: ...
