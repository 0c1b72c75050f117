"""The interventions of a study where none are given, and interventions written as text on the command line."""

from __future__ import annotations

from typing import Any

from strati.core.errors import BadInputError
from strati.interventions.kinds import KINDS, Intervention, make, parse_value

STANDARD_SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "truncate": {"parameters": (0.1, 0.25, 0.5, 0.75, 0.9)},
    "quantise": {"bits": (8, 6, 4, 3, 2)},
    "prune": {"share": (0.3, 0.5, 0.7, 0.9)},
    "drop": {},
}
"""What users do to networks: the settings that a study tries where none are given."""


def parse_intervention(name: str, text: str = "") -> Intervention:
    """An intervention from its settings as text; several values of one option stand behind each other.

    Raises:
        BadInputError: A word is no ``option=value``, or an option or value is not one of the intervention's.

    Examples:
        >>> from strati.interventions.kinds import setting_text
        >>> [setting_text(s) for s in parse_intervention("quantise", "bits=4,3,group=64").settings]
        ['bits=4,group=64', 'bits=3,group=64']
        >>> parse_intervention("prune", "pattern=2:4").settings
        ((('pattern', '2:4'),),)
    """
    values: dict[str, list[Any]] = {}
    option = ""
    for word in filter(None, (part.strip() for part in text.split(","))):
        first, equals, value_text = word.partition("=")
        option = first.strip() if equals else option
        if not option:
            example = next(iter(KINDS[name].main), "option")
            raise BadInputError(f"{name} {text}", f"is not a list of settings; write {example}=2,4,8")
        values.setdefault(option, []).append(parse_value(value_text if equals else word))
    return make(name, values)


STANDARD = tuple(make(name, values) for name, values in STANDARD_SETTINGS.items())
"""What users do to networks, as the interventions of a study."""
