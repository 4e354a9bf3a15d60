"""The bundled model with other chat templates: one shows tools and reads the argument `style`, one takes no tools."""

from __future__ import annotations

from pathlib import Path

import pdserve

BUNDLED = Path(pdserve.__file__).parent / "models" / "stdlib-5m"
TEMPLATE = (
    "{{- style or '' }}"
    "{%- for tool in tools or [] %}{{- '# tool <tool_call> ' + tool.function.name + '\\n' }}{%- endfor %}"
    "{%- for message in messages %}{{- '# ' + message.role + ': ' + message.content + '\\n' }}"
    "{%- for call in message.tool_calls or [] %}{{- call.function.name + (call.function.arguments | tojson) + '\\n' }}"
    "{%- endfor %}{%- endfor %}"
)


UNTOOLED = "{%- for message in messages %}{{- '# ' + message.content + '\\n' }}{%- endfor %}"


def make_tooled_model(parent: Path, template: str = TEMPLATE, name: str = "tooled") -> Path:
    folder = parent / name
    folder.mkdir()
    for path in BUNDLED.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(template)
    return folder
