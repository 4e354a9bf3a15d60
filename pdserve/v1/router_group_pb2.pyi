from pdserve.v1 import inference_pb2 as _inference_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EndTenantSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class EndTenantSessionResponse(_message.Message):
    __slots__ = ("is_known",)
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    is_known: bool
    def __init__(self, is_known: _Optional[bool] = ...) -> None: ...

class ListTenantSessionsRequest(_message.Message):
    __slots__ = ("tenant", "limit", "after")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limit: int
    after: int
    def __init__(self, tenant: _Optional[str] = ..., limit: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class ListTenantSessionsResponse(_message.Message):
    __slots__ = ("page",)
    PAGE_FIELD_NUMBER: _ClassVar[int]
    page: _inference_pb2.ListSessionsResponse
    def __init__(self, page: _Optional[_Union[_inference_pb2.ListSessionsResponse, _Mapping]] = ...) -> None: ...
