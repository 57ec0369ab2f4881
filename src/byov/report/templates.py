"""The HTML templates of this room, and how they are filled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape


def fill(template: str, **values: Any) -> str:
    """A template's text with these values, escaped; one that the template asks for and is not given is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code_spans"] = _code_spans
    return environment.get_template(template).render(**values)


def _code_spans(text: str) -> Markup:
    """A sentence with `commands` set as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))
