"""The base class of the configuration's models. It adds docstrings to the JSON Schema."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


def _describe_fields(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add the docstring below each field to the model's JSON Schema, as a description.

    pydantic's ``use_attribute_docstrings`` would read the sources at each import of the
    models. This takes 1/10 of the time of ``kvtier check``.
    """
    for owner in model.__mro__:
        if owner is BaseModel:
            return
        try:
            source = inspect.getsource(owner)
        except OSError:  # typed into an interpreter
            continue
        body = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in pairwise(body.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ) if name in model.model_fields:
                    key = model.model_fields[name].serialization_alias or name
                    schema["properties"][key].setdefault("description", inspect.cleandoc(text))


class Section(BaseModel):
    """A section of the file. It is frozen, checks types strictly and refuses unknown keys."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        json_schema_extra=_describe_fields,
    )
