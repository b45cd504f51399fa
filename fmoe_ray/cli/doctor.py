"""`fmoe doctor`: what this machine offers, and what to do about what it lacks."""

import dataclasses
import json
from typing import Annotated

import typer

from fmoe_ray.cli.app import app
from fmoe_ray.doctor import examine


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine offers. The exit code is 0 also when there are warnings."""
    findings = examine()
    if as_json:
        body = {
            "ok": all(finding.is_ok for finding in findings),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        typer.echo(json.dumps(body))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "ok  " if finding.is_ok else "warn"
        typer.echo(f"{mark}  {finding.name:<{width}}  {finding.value}")
        if finding.remedy:
            typer.echo(f"{'':{width + 8}}{finding.remedy}")
