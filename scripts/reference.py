"""Writes the pages of docs/reference from the code: settings, commands, metrics and spans, lifecycles on workers,
fields of HTTP requests. `make reference` runs it.

    python scripts/reference.py [--check] [--root DIR]

With --check it writes nothing, names each page that is stale, and fails. Pages have no value of this machine: a default
that depends on the host is described in the meaning of its setting or flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from decode_worker import decode_sequence as decode_lifecycle
from pdserve.cli.main import make_parsers
from pdserve.config import GatewayConfig, RouterConfig, WorkerConfig
from pdserve.core.setting import NAME, Range
from pdserve.gateway.api.field_support import IGNORED, MODELS, REJECTED, Endpoint
from pdserve.launch.keys import COMPUTED, TOP
from pdserve.launch.report import LogLimits
from pdserve.launch.spec import NUM_WORKERS, ClusterSpec
from pdserve.telemetry.metric_names import METRICS, LabelValues, MetricSpec
from pdserve.telemetry.names import ATTRIBUTES, SPANS
from prefill_worker import prefill_sequence as prefill_lifecycle
from scripts.answer_fields import ADDED, EMPTY, FILLED, AnswerKind

COMMAND: Final = "make reference"
FOLDER: Final = "docs/reference"
ROOT: Final = Path(__file__).resolve().parent.parent
# By the end of a name, as CONTRIBUTING.md has it.
UNITS: Final[Mapping[str, str]] = {
    "_bytes_s": "bytes a second",
    "_s": "seconds",
    "_bytes": "bytes",
    "_mib": "MiB",
    "_tokens": "tokens",
    "_blocks": "blocks",
    "_share": "fraction",
    "block_size": "tokens",
}
METRIC_UNITS: Final[Mapping[str, str]] = {
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_ratio": "fraction",
    "_tokens": "tokens",
    "_blocks": "blocks",
}
Field = dataclasses.Field[Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="root of the repository")
    args = parser.parse_args()
    stale = 0
    for name, render in PAGES.items():
        page, text = args.root / name, render()
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        if args.check:
            print(f"{name} is stale: run `{COMMAND}` and commit the page", file=sys.stderr)
            stale += 1
        else:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 1 if stale else 0


# --- settings -------------------------------------------------------------------------------------------------


def settings_page() -> str:
    return page(
        "Settings",
        "pdserve/config.py",
        "`pdserve up` reads settings from a TOML file (`--config FILE`), from `--set KEY=VALUE` and from flags. Flags "
        "override `--set`, and `--set` overrides the file. In the file, `router.max_queue` is the key `max_queue` of "
        "the table `[router]`. An unknown key or a value outside its range is an error.",
        "",
        "## Cluster",
        "These keys stand outside all tables. Most of them are also flags of [`pdserve up`](cli.md#pdserve-up).",
        "",
        *settings_table(cluster_rows()),
        "",
        "## Router",
        *settings_table(config_rows(RouterConfig, "router.")),
        "",
        "## Gateway",
        "Of the [HTTP gateway](../http.md).",
        "",
        *settings_table(config_rows(GatewayConfig, "gateway.")),
        "",
        "## Workers",
        "`worker.KEY` sets a key for all workers. `prefill_worker.KEY` and `decode_worker.KEY` override it for one "
        "role.",
        "",
        *settings_table(config_rows(WorkerConfig, "worker.")),
        "",
        "## Flags of single processes",
        "`pdserve up` computes these settings itself and rejects them in tables. They are flags of `python -m router`, "
        "`python -m prefill_worker`, `python -m decode_worker` and `python -m pdserve.gateway`, for deployments that "
        "start processes one by one. "
        "All keys above are flags of these programs too: `max_queue` is `--max-queue`.",
        "",
        *settings_table(flag_rows()),
        "",
        "## Secrets",
        "A secret is not accepted on a command line; a Redis URL is a secret if it holds a password. Each variable can "
        "be replaced with `NAME_FILE`, which names a file that holds the value. See [secrets](../secrets.md).",
        "",
        *table(("variable", "setting", "meaning"), secret_rows()),
    )


def settings_table(rows: Iterable[Sequence[str]]) -> list[str]:
    return table(("key", "type", "default", "allowed", "unit", "SIGHUP", "meaning"), rows)


def cluster_rows() -> Iterator[Sequence[str]]:
    """TOP: the meaning is the flag's where `pdserve up` has one, else that of the setting with the same name."""
    of_config = {one.name: one for kind in (RouterConfig, WorkerConfig, LogLimits) for one in dataclasses.fields(kind)}
    of_spec = {one.name: one for one in dataclasses.fields(ClusterSpec)}
    flags = {action.dest: action for action in actions(make_parsers(["up"])[1]["up"])}
    for key, kind in TOP.items():
        field = of_config.get(key)
        default = next((one.default for one in (of_spec.get(key), field) if one is not None), "")
        meaning = flags[key].help if key in flags else field.metadata["help"] if field is not None else ""
        shown = "" if default is dataclasses.MISSING else value(default)
        yield (
            code(key),
            type_name(kind),
            shown or "none",
            interval(NUM_WORKERS[key]) if key in NUM_WORKERS else "" if field is None else allowed(field),
            unit(key, UNITS),
            live(key in ("log_level", "log_max_bytes", "log_files")),
            (meaning or "").removesuffix(f" ({default})"),
        )


def config_rows(kind: type, prefix: str) -> Iterator[Sequence[str]]:
    for one in dataclasses.fields(kind):
        if one.name not in COMPUTED:
            yield setting_row(one, kind, code(prefix + one.name))


def flag_rows() -> Iterator[Sequence[str]]:
    for program, kind in (("router", RouterConfig), ("workers", WorkerConfig), ("gateway", GatewayConfig)):
        for one in dataclasses.fields(kind):
            if one.name in COMPUTED and one.name != "cluster_secret":
                flag = code("--" + one.name.replace("_", "-"))
                yield setting_row(one, kind, f"{flag} ({program})")


def secret_rows() -> Iterator[Sequence[str]]:
    found = {
        one.metadata["env"]: one
        for kind in (RouterConfig, WorkerConfig, GatewayConfig)
        for one in dataclasses.fields(kind)
        if one.metadata["env"]
    }
    for env, one in found.items():
        yield code(env), code(one.name), one.metadata["help"]


def setting_row(one: Field, kind: type, key: str) -> Sequence[str]:
    hint = typing.get_type_hints(kind)[one.name]
    default = "required" if one.default is dataclasses.MISSING else value(one.default) or "none"
    meaning = one.metadata["help"]
    if env := one.metadata["env"]:
        meaning += (
            f" (with a password in {code(env)} only)" if one.metadata["is_url"] else f" (in {code(env)}; see below)"
        )
    return key, type_name(hint), default, allowed(one), unit(one.name, UNITS), live(one.metadata["is_live"]), meaning


def live(is_live: bool) -> str:
    return "changes" if is_live else ""


def type_name(kind: Any) -> str:
    return "list of str" if kind in (tuple, tuple[str, ...]) else kind.__name__


def allowed(one: Field) -> str:
    if one.metadata["choices"]:
        return ", ".join(code(choice) for choice in one.metadata["choices"])
    if one.metadata["is_name"]:
        return code(NAME.pattern)
    within = one.metadata["range"]
    return interval(within) if isinstance(within, Range) else ""


def interval(within: Range) -> str:
    return f"{within.low:.15g} to {within.high:.15g}"


def value(default: Any) -> str:
    """The value in TOML syntax; empty for an empty text."""
    if isinstance(default, bool):
        return code("true" if default else "false")
    return code(str(default)) if default not in ("", (), None) else ""


# --- commands -------------------------------------------------------------------------------------------------


def cli_page() -> str:
    _, parser_of, loaded = make_parsers()
    lines = [
        "`pdserve COMMAND --help` prints the flags of a command. A default is in parentheses at the end of a meaning. "
        "A command exits with status 1 if it failed, 2 for a wrong command line, and 130 if it was interrupted.",
        "",
        *table(
            ("command", "meaning"),
            ((f"[{code(name)}](#pdserve-{name})", command.help) for name, command in loaded.items()),
        ),
    ]
    shown = set()
    for name, parser in parser_of.items():
        lines += ["", f"## pdserve {name}", f"{sentence(loaded[name].help)}"]
        if loaded[name].run in shown:  # the arguments are those of another command
            continue
        shown.add(loaded[name].run)
        lines += arguments(parser)
        if parser.epilog:
            lines += ["", parser.epilog]
    return page("Commands", "pdserve/cli/main.py", *lines)


def arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table of the arguments, or a section for each action of the command."""
    nested = [action for action in actions(parser) if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield ""
        yield from table(("argument", "meaning"), (flag_row(parser, action) for action in actions(parser)))
    for choice in (choice for action in nested for choice in action._choices_actions):
        one = nested[0].choices[choice.dest]
        yield from ("", f"### {one.prog}", sentence(choice.help))
        yield from arguments(one)


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest != "help"]


def flag_row(parser: argparse.ArgumentParser, action: argparse.Action) -> Sequence[str]:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    if not action.option_strings:
        return code(name), action.help or ""
    words = name if action.metavar else "|".join(map(str, action.choices)) if action.choices else name.upper()
    shown = {0: "", "?": f" [{words}]", "+": f" {words} [{words} ...]"}.get(action.nargs, f" {words}")
    required = " (required)" if action.required else ""
    return ", ".join(code(flag + shown) for flag in action.option_strings), (action.help or "") + required


# --- metrics and spans ----------------------------------------------------------------------------------------


def metrics_page() -> str:
    by: dict[str, list[MetricSpec]] = {}
    for spec in METRICS.values():
        for process in filter(None, (spec.by, spec.also_by)):
            by.setdefault(process, []).append(spec)
    lines = [
        "Each process serves its metrics at `/metrics` on its port for metrics. `pdserve up --metrics PORT` sets the "
        "ports of all processes. The settings [`router.metrics_port`, `worker.metrics_port` and "
        "`gateway.metrics_port`](settings.md) set those of one kind. The gateway also serves its metrics on its HTTP "
        "port. Each process adds the standard `process_*` metrics: CPU time, memory, file descriptors and start time. "
        "[Telemetry](../telemetry.md) explains how the numbers are measured.",
    ]
    for process, specs in by.items():
        lines += ["", f"## Metrics of {'workers' if process == 'worker' else f'the {process}'}"]
        lines += table(("name", "type", "labels", "unit", "meaning"), map(metric_row, specs))
    lines += ["", "### Buckets", "Upper bounds of the buckets of each histogram, in its unit.", ""]
    lines += table(("histogram", "bounds"), bucket_rows())
    lines += [
        "",
        "## Spans",
        "The router sends spans to the OTLP endpoint of the setting `otlp`.",
        "",
    ]
    lines += table(
        ("name", "work of", "kind", "parent", "meaning", "attributes"),
        (
            (
                code(span.name),
                span.service,
                span.kind,
                f"of the {span.parent}" if span.parent else "",
                span.help,
                ", ".join(map(code, span.attributes)),
            )
            for span in SPANS.values()
        ),
    )
    lines += ["", "### Attributes"]
    lines += table(("name", "meaning"), ((code(name), text) for name, text in ATTRIBUTES.items()))
    return page("Metrics and spans", "metric_names.py and names.py in pdserve/telemetry", *lines)


def metric_row(spec: MetricSpec) -> Sequence[str]:
    labels = "<br>".join(f"{code(name)}: {label_values(values)}" for name, values in spec.labels.items())
    of = unit(spec.name.removesuffix("_total"), METRIC_UNITS) or "count"
    return code(spec.name), spec.kind, labels, of, spec.help


def label_values(values: LabelValues) -> str:
    return values if isinstance(values, str) else ", ".join(code(one) if one else "empty" for one in values)


def bucket_rows() -> Iterator[Sequence[str]]:
    found: dict[tuple[float, ...], list[str]] = {}
    for spec in METRICS.values():
        if spec.buckets:
            found.setdefault(spec.buckets, []).append(spec.name)
    for buckets, names in found.items():
        yield "<br>".join(map(code, names)), ", ".join(f"{bound:g}" for bound in buckets)


# --- lifecycles of workers -------------------------------------------------------------------------------------


def lifecycles_page() -> str:
    lines = [
        "What happens to an attempt on a worker. An event that is not in a table is a defect of the worker. The router "
        "has such a table for requests: [Request lifecycle](../lifecycle.md).",
    ]
    for name, lifecycle in (("Prefill worker", prefill_lifecycle), ("Decode worker", decode_lifecycle)):
        lines += ["", f"## {name}", "```mermaid", "stateDiagram-v2"]
        for stage, label in lifecycle.STARTS.items():
            lines.append(f"    [*] --> {stage.value}" + (f": {label}" if label else ""))
        moves = lifecycle.MOVES.items()
        lines += [f"    {stage.value} --> {after.value}: {move.value}" for (stage, move), after in moves]
        lines += ["    released --> [*]", "```", ""]
        lines += table(
            ("stage", "event", "next stage"),
            ((stage.value, move.value, after.value) for (stage, move), after in moves),
        )
    return page("Lifecycles on workers", "lifecycle.py of both workers", *lines)


# --- HTTP -----------------------------------------------------------------------------------------------------


def http_page() -> str:
    lines = [
        "What the [HTTP gateway](../http.md) does with each field of a request. A field with the value null counts as "
        "absent. A field in no table is rejected with the code `unknown_parameter`. "
        "`tests/unit/gateway` tries each row with the official client, and finds fields that have no "
        "row.",
    ]
    paths: dict[Endpoint, str] = {
        "chat": "/v1/chat/completions",
        "text": "/v1/completions",
        "responses": "/v1/responses",
        "messages": "/v1/messages",
    }
    for endpoint, path in paths.items():
        lines += ["", f"## {path}", ""]
        lines += table(("field", "support", "meaning or reason"), field_rows(endpoint))
    lines += [
        "",
        "## Fields of answers",
        "Fields of OpenAI's answers, and those that pdserve adds. A field that is not filled is null or absent. "
        "`choices.message.role` is the field `role` in the field `message` of each element of `choices`. "
        "`tests/unit/gateway/test_response_fields.py` tries each row with the official client, and finds fields of its "
        "types that have no row.",
    ]
    titles: dict[AnswerKind, str] = {
        "chat": "A chat",
        "chunk": "A chunk of a streamed chat",
        "text": "A text completion, whole or streamed",
        "response": "A response",
    }
    for answer, title in titles.items():
        lines += ["", f"### {title}", ""]
        lines += table(("field", "filled", "when or why not"), answer_rows(answer))
    sources = "request_models.py and field_support.py in pdserve/gateway/api, and scripts/answer_fields.py"
    return page("Fields of HTTP requests", sources, *lines)


def answer_rows(answer: AnswerKind) -> Iterator[Sequence[str]]:
    for name, when in FILLED[answer].items():
        yield code(name), "yes", when
    for name, when in ADDED[answer].items():
        yield code(name), "added", when
    for name, reason in EMPTY[answer].items():
        yield code(name), "no", reason


def field_rows(endpoint: Endpoint) -> Iterator[Sequence[str]]:
    for name, field in MODELS[endpoint].model_fields.items():
        yield code(name), "supported", field.description or ""
    for name, reason in IGNORED[endpoint].items():
        yield code(name), "ignored", reason
    for name, rejected in REJECTED[endpoint].items():
        harmless = ", ".join(code(json.dumps(value)) for value in rejected.harmless)
        yield code(name), f"rejected, except {harmless}" if harmless else "rejected", rejected.reason


# --- markdown -------------------------------------------------------------------------------------------------


def page(title: str, source: str, *lines: str) -> str:
    note = f"<!-- Made by `{COMMAND}` from {source}. Not edited. -->"
    return "\n".join((f"# {title}", note, "", *lines)) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = (" | ".join(one.replace("|", "\\|") for one in row) for row in rows)
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {row} |" for row in cells)]


def code(text: str) -> str:
    return f"`{text}`"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def unit(name: str, units: Mapping[str, str]) -> str:
    return next((text for end, text in units.items() if name.endswith(end)), "")


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    f"{FOLDER}/settings.md": settings_page,
    f"{FOLDER}/cli.md": cli_page,
    f"{FOLDER}/metrics.md": metrics_page,
    f"{FOLDER}/lifecycles.md": lifecycles_page,
    f"{FOLDER}/http.md": http_page,
}

if __name__ == "__main__":
    sys.exit(main())
