"""Writes nested dicts, lists and scalars as YAML, so that launching needs no package."""

import json
from typing import Any


def to_yaml(value: Any) -> str:
    """Block style; keys as they are, every string in double quotes, so that none is read as a number or a date."""
    return '\n'.join(_lines(value)) + '\n'


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for key, inner in value.items() for line in _entry(key, inner)]
    if isinstance(value, list) and value:
        return [f'{"  " if i else "- "}{line}' for inner in value for i, line in enumerate(_lines(inner))]
    return [json.dumps(value, ensure_ascii=False)]


def _entry(key: str, value: Any) -> list[str]:
    lines = _lines(value)
    if isinstance(value, dict | list) and value:
        return [f'{key}:', *(f'  {line}' for line in lines)]
    return [f'{key}: {lines[0]}']
