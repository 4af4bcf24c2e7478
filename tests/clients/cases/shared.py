"""What every client is asked to do: each case is one function without arguments, which fails if the
client does not get what it must."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, Field

URL = sys.argv[1]
"""The server's address."""
WORD, REVERSED = "planet", "tenalp"
MODEL = "reverse"
"""An adapter that answers with the word spelled backwards."""


class Paint(BaseModel):
    """Paint a wall."""

    color: Literal["red", "green"]
    coats: int = Field(ge=1, le=9)


def run(**cases: Callable[[], object]) -> None:
    """Try the cases, and print which of them work, by name, as JSON."""
    results: dict[str, bool] = {}
    for name, case in cases.items():
        try:
            case()
            results[name] = True
        except Exception:
            print(f"--- {name}", file=sys.stderr)
            traceback.print_exc()
            results[name] = False
    print(json.dumps(results), flush=True)
