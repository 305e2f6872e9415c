"""Write `crds.json`: what of custom resources' definitions our documents are held to.

Run: `python tests/factory/crds.py CHART DEFINITION…`; CHART: documents that `helm template` or
`headrace factory workflow kuberay` wrote, of RayJobs also `deploy/ray/serve.yaml`, one behind the
other; excerpts of other kinds than those given now stay;
DEFINITION: the YAML of a CustomResourceDefinition and where it comes from, joined by `=`. Types,
bounds and required fields of the paths that the documents have are kept, everything else is left
out and refused: a field that a definition lacks is in no excerpt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

BOUNDS = (
    "type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "minProperties", "maxProperties", "required",
)  # fmt: skip


def excerpt(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """The part of a schema that says something about this value."""
    made = {name: schema[name] for name in BOUNDS if name in schema}
    if isinstance(value, dict) and "properties" in schema:
        known = {
            k: excerpt(schema["properties"][k], v)
            for k, v in value.items()
            if k in schema["properties"]
        }
        made |= {"properties": known, "additionalProperties": False}
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = excerpt(schema["additionalProperties"], None)
    elif isinstance(value, list) and "items" in schema:
        made["items"] = excerpt(schema["items"], merged(value) or None)
    return made


def merged(values: list[Any]) -> dict[str, Any]:
    """All fields of a list's objects as one object; lists and objects in them are joined."""
    found: dict[str, Any] = {}
    for one in values:
        for name, value in one.items() if isinstance(one, dict) else ():
            old = found.get(name)
            if isinstance(value, list) and isinstance(old, list):
                value = [*old, *value]
            elif isinstance(value, dict) and isinstance(old, dict):
                value = merged([old, value])
            found[name] = value
    return found


def main(chart: Path, definitions: list[str]) -> dict[str, Any]:
    given = [one for one in yaml.safe_load_all(chart.read_text()) if one]
    listed = [one for each in given for one in each.get("items", [each])]
    documents = {kind: merged([one for one in listed if one["kind"] == kind])
                 for kind in {one["kind"] for one in listed}}  # fmt: skip
    schemas, sources = {}, {}
    for given in definitions:
        path, source = given.split("=", 1)
        found = yaml.safe_load(Path(path).read_text())["spec"]
        document = documents[found["names"]["kind"]]
        (schema,) = [
            one["schema"]["openAPIV3Schema"]
            for one in found["versions"]
            if f"{found['group']}/{one['name']}" == document["apiVersion"] and one["served"]
        ]
        made = excerpt(schema, document)
        made["properties"]["metadata"] = {"type": "object"}  # Of every resource; Kubernetes' own.
        schemas[document["kind"]], sources[document["kind"]] = made, source
    return {"sources": sources, "schemas": schemas}


if __name__ == "__main__":
    target = Path(__file__).with_name("crds.json")
    told = json.loads(target.read_text())
    for part, found in main(Path(sys.argv[1]), sys.argv[2:]).items():
        told[part] |= found
    target.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
