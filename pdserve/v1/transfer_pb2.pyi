from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransportKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_KIND_UNSPECIFIED: _ClassVar[TransportKind]
    TRANSPORT_KIND_SHM: _ClassVar[TransportKind]
    TRANSPORT_KIND_TCP: _ClassVar[TransportKind]
    TRANSPORT_KIND_NCCL: _ClassVar[TransportKind]
    TRANSPORT_KIND_CUDA_IPC: _ClassVar[TransportKind]
    TRANSPORT_KIND_NIXL: _ClassVar[TransportKind]
    TRANSPORT_KIND_TCP_STAGED: _ClassVar[TransportKind]

class ChecksumKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKSUM_KIND_UNSPECIFIED: _ClassVar[ChecksumKind]
    CHECKSUM_KIND_XXH3_64: _ClassVar[ChecksumKind]
    CHECKSUM_KIND_BLAKE2B_64: _ClassVar[ChecksumKind]
TRANSPORT_KIND_UNSPECIFIED: TransportKind
TRANSPORT_KIND_SHM: TransportKind
TRANSPORT_KIND_TCP: TransportKind
TRANSPORT_KIND_NCCL: TransportKind
TRANSPORT_KIND_CUDA_IPC: TransportKind
TRANSPORT_KIND_NIXL: TransportKind
TRANSPORT_KIND_TCP_STAGED: TransportKind
CHECKSUM_KIND_UNSPECIFIED: ChecksumKind
CHECKSUM_KIND_XXH3_64: ChecksumKind
CHECKSUM_KIND_BLAKE2B_64: ChecksumKind

class Fingerprint(_message.Message):
    __slots__ = ("protocol", "model", "engine", "shape")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    engine: str
    shape: KvShape
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ..., engine: _Optional[str] = ..., shape: _Optional[_Union[KvShape, _Mapping]] = ...) -> None: ...

class KvShape(_message.Message):
    __slots__ = ("layout", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_size", "tp_degree", "tp_rank")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_DEGREE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    layout: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tp_degree: int
    tp_rank: int
    def __init__(self, layout: _Optional[str] = ..., dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., tp_degree: _Optional[int] = ..., tp_rank: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("fingerprint", "sender_id", "sender_incarnation", "host_id", "transports", "checksums", "wire_dtype", "version")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fingerprint: Fingerprint
    sender_id: str
    sender_incarnation: str
    host_id: str
    transports: _containers.RepeatedScalarFieldContainer[TransportKind]
    checksums: _containers.RepeatedScalarFieldContainer[ChecksumKind]
    wire_dtype: str
    version: str
    def __init__(self, fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., sender_id: _Optional[str] = ..., sender_incarnation: _Optional[str] = ..., host_id: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[TransportKind, str]]] = ..., checksums: _Optional[_Iterable[_Union[ChecksumKind, str]]] = ..., wire_dtype: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("transport", "address", "ticket", "receiver_incarnation", "checksum", "chunk_bytes", "transport_reason", "version")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    transport: TransportKind
    address: str
    ticket: bytes
    receiver_incarnation: str
    checksum: ChecksumKind
    chunk_bytes: int
    transport_reason: str
    version: str
    def __init__(self, transport: _Optional[_Union[TransportKind, str]] = ..., address: _Optional[str] = ..., ticket: _Optional[bytes] = ..., receiver_incarnation: _Optional[str] = ..., checksum: _Optional[_Union[ChecksumKind, str]] = ..., chunk_bytes: _Optional[int] = ..., transport_reason: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("first_block", "num_blocks")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    num_blocks: int
    def __init__(self, first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("transfer_id", "attempt", "generation", "endpoint", "worker_id", "incarnation", "fingerprint", "extents", "num_cached_blocks", "num_blocks", "hash_seed", "rank_endpoints")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    RANK_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    attempt: int
    generation: int
    endpoint: str
    worker_id: str
    incarnation: str
    fingerprint: Fingerprint
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    num_cached_blocks: int
    num_blocks: int
    hash_seed: bytes
    rank_endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transfer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., generation: _Optional[int] = ..., endpoint: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., num_cached_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., hash_seed: _Optional[bytes] = ..., rank_endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("grant", "block_hashes", "deadline_s", "source_incarnation")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    grant: Grant
    block_hashes: bytes
    deadline_s: float
    source_incarnation: str
    def __init__(self, grant: _Optional[_Union[Grant, _Mapping]] = ..., block_hashes: _Optional[bytes] = ..., deadline_s: _Optional[float] = ..., source_incarnation: _Optional[str] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("refusal", "num_found")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    num_found: int
    def __init__(self, refusal: _Optional[str] = ..., num_found: _Optional[int] = ...) -> None: ...
