"""JSON files that a person or another program wrote: read whole, or refused in one sentence."""

import json
from pathlib import Path
from typing import Any

from sparrow_jax.config import ConfigError


def read_object(file: Path, named: str = '') -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
        file: the file.
        named: begins the error; the file's path by default, or the setting that names it.

    Raises:
        ConfigError: no such file, or it cannot be read, is no JSON, or holds something else than an object.
    """
    named = named or str(file)
    if not file.is_file():
        raise ConfigError(f'{named}: no such file')
    try:
        value = json.loads(file.read_text(encoding='utf-8-sig'))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also what is no text at all
        raise ConfigError(f'{named}: not JSON ({error})') from error
    if not isinstance(value, dict):
        raise ConfigError(f'{named}: must hold one JSON object')
    return value


def without_nan(value: Any) -> Any:
    """A value of what JSON can hold and NumPy's numbers, with null for NaN and infinities, which JSON lacks."""
    return json.loads(json.dumps(value, default=lambda one: one.item()), parse_constant=lambda _: None)
