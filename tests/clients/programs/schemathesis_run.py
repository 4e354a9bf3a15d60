"""schemathesis: sends requests that the OpenAPI document describes, and broken ones. Prints one JSON object: by pass,
the failed checks and the number of answers by operation and status. Runs in the client's own environment."""

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path

URL, MODEL = sys.argv[1:]
EXAMPLES = 30  # of each operation, beside those of the coverage phase
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method,allow_header_conformance,missing_required_header"
)
ROOT = URL.removesuffix("/v1")
ENDLESS = "/ui/events"
#: Most random values of these fields are errors, because the fields depend on each other.
DEPENDENT = ("tool_choice", "tools", "stream_options", "structured_outputs", "response_format", "logit_bias", "best_of")


def narrowed(document: dict) -> dict:
    """Requests that are mostly accepted: one kind of message, independent fields, and no headers."""
    found = json.loads(json.dumps(document))
    schemas = found["components"]["schemas"]
    message = {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string", "minLength": 1}}
    schemas["Message"] |= {"properties": message, "required": ["role", "content"], "additionalProperties": False}
    texts = {"type": "string", "minLength": 1, "maxLength": 40}
    for name in ("ChatRequest", "TextRequest", "ResponsesRequest", "TokenizeRequest", "DetokenizeRequest"):
        properties = schemas[name]["properties"]
        properties["model"] = {"enum": [MODEL, None]}
        for field in DEPENDENT:
            properties.pop(field, None)
        for field in {"prompt", "input"} & properties.keys():
            properties[field] = texts
    schemas["DetokenizeRequest"]["properties"]["tokens"] |= {"items": {"minimum": 0, "maximum": 1000}}
    for item in found["paths"].values():
        for operation in item.values():
            if "requestBody" in operation:
                operation.pop("parameters", None)
    return found


def run(document: dict, folder: Path) -> dict:
    given, report = folder / "openapi.json", folder / "report.ndjson"
    given.write_text(json.dumps(document))
    words = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", str(given), "--url", ROOT, "--checks", CHECKS),
        *("--exclude-path", ENDLESS, "--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-shrink"),
        *("--max-examples", str(EXAMPLES), "--seed", "1", "--suppress-health-check", "all"),
        *("--request-timeout", "120", "--report", "ndjson", "--report-ndjson-path", str(report)),
    ]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    statuses: Counter = Counter()
    for line in report.read_text().splitlines():
        recorder = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
        for one in recorder.get("interactions", {}).values():
            statuses[f"{recorder['label']} {one['response']['status_code'] if one.get('response') else 'none'}"] += 1
    return {"status": done.returncode, "output": done.stdout[-4000:], "answers": statuses}


document = json.load(urllib.request.urlopen(f"{ROOT}/openapi.json"))
with tempfile.TemporaryDirectory() as folder:
    print(json.dumps({"whole": run(document, Path(folder)), "narrowed": run(narrowed(document), Path(folder))}))
