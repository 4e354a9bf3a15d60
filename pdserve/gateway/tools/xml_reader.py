"""Reads the calls of Qwen3-Coder and Qwen3.5, which are XML. Pure.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter> .. </function></tool_call>

Values are bare text. Models sometimes omit <tool_call>, which is accepted before the name of a tool, or </parameter>.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, final

from pdserve.gateway.tools.call_object import MAX_NAME_CHARS
from pdserve.gateway.tools.call_reader import SPACE, CallReader
from pdserve.gateway.tools.events import Arguments
from pdserve.gateway.tools.marks import Mark
from pdserve.gateway.tools.parameter_values import ParameterValue, parameter_types

_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


class _Place(Enum):
    TEXT = "outside of calls"
    OPENED = "after <tool_call>"
    NAME = "after <function="
    BETWEEN = "between parameters"
    KEY = "after <parameter="
    VALUE = "in a value"


@final
class XmlReader(CallReader):
    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        """`parameters` are the schemas of the tools' parameters, by the tools' names."""
        super().__init__()
        self._parameters = parameters
        self._place = _Place.TEXT
        self._outside = Mark(_CALL, _CALL_END, _FUNCTION)
        self._function = Mark(_FUNCTION)
        self._inside = Mark(_PARAMETER, _FUNCTION_END)
        self._value_end = Mark(_PARAMETER_END, _PARAMETER, _FUNCTION_END)
        self._opening = ""  # the first mark of what may become a call; the text after it is in _raw
        self._word = ""  # a name or key that is being read
        self._schema: Mapping[str, Any] = {}  # of the call's parameters
        self._value = ParameterValue(frozenset())
        self._separator = ""  # before the next parameter

    def _char(self, char: str) -> None:
        place = self._place
        if place is _Place.TEXT:
            self._feed_text(char)
        elif place is _Place.OPENED:
            self._raw += char
            self._feed_opened(char)
        elif place is _Place.NAME:
            self._raw += char
            self._feed_name(char)
        elif place is _Place.BETWEEN:
            self._inside.feed(char)  # text between parameters is dropped
            self._go_on(self._inside.found())
        elif place is _Place.KEY:
            self._feed_key(char)
        else:
            self._found.append(Arguments(self._value.feed(self._value_end.feed(char))))
            if mark := self._value_end.found():
                self._found.append(Arguments(self._value.end()))
                self._go_on(mark)

    def _end(self) -> None:
        if self._place in (_Place.OPENED, _Place.NAME):
            self._write_all(self._opening + self._raw)
        self._write_all(self._outside.rest())
        super()._end()

    # ------------------------------------------------------------------------------------------------------------

    def _feed_text(self, char: str) -> None:
        self._write_all(self._outside.feed(char))
        mark = self._outside.found()
        if mark == _CALL_END and self._has_calls:
            self._space = ""
        elif mark == _CALL_END:
            self._write_all(mark)
        elif mark:
            self._opening, self._raw, self._word = mark, "", ""
            self._place = _Place.OPENED if mark == _CALL else _Place.NAME

    def _feed_opened(self, char: str) -> None:
        if char in SPACE and not self._function.held:
            return
        if self._function.feed(char):
            self._function.rest()
            self._reject()
        elif self._function.found():
            self._place = _Place.NAME

    def _feed_name(self, char: str) -> None:
        if char != ">":
            self._word += char
            if char in "<\n" or len(self._word) > MAX_NAME_CHARS:
                self._reject()
            return
        name = self._word.strip()
        if not name or (self._opening == _FUNCTION and name not in self._parameters):
            self._reject()
            return
        self._call(name)
        self._found.append(Arguments("{"))
        self._schema, self._separator, self._place = self._parameters.get(name, {}), "", _Place.BETWEEN

    def _reject(self) -> None:
        """What was read is not a call. A call may begin within the text after its first mark."""
        raw, self._place = self._raw, _Place.TEXT
        self._write_all(self._opening)
        for char in raw:
            self._char(char)

    def _go_on(self, mark: str | None) -> None:
        """After a mark within a call."""
        if mark == _PARAMETER:
            self._place, self._word = _Place.KEY, ""
        elif mark == _PARAMETER_END:
            self._place = _Place.BETWEEN
        elif mark == _FUNCTION_END:
            self._found.append(Arguments("}"))
            self._place = _Place.TEXT

    def _feed_key(self, char: str) -> None:
        if char != ">":
            self._word += char
            return
        key = self._word.strip()
        self._found.append(Arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: "))
        self._value = ParameterValue(parameter_types(self._schema, key))
        self._separator, self._place = ", ", _Place.VALUE
