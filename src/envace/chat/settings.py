"""Which chat template a model is spoken to with, and its switches."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import jinja2
from pydantic import AfterValidator, Field

from envace.chat.render import ChatRenderer
from envace.errors import UserError
from envace.types import Frozen


def _anchored(path: str) -> str:
    """A path that exists is made absolute, so that a run can be resumed from anywhere; names of shipped things stay."""
    return str(Path(path).absolute()) if "/" in path and Path(path).exists() else path


PathOrName = Annotated[str, AfterValidator(_anchored)]


class ChatSettings(Frozen):
    """How conversations become text."""

    template: PathOrName | None = Field(
        default=None,
        description="a Jinja file in place of the model's own chat template, or a shipped one: chatml-tools",
    )
    enable_thinking: bool | None = Field(default=None, description="told to templates that have this switch")

    def renderer(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> ChatRenderer:
        """The renderer for ``tokenizer``, which from now on (and where it is saved) has the chosen template.

        Raises:
            UserError: a template that is not there or does not parse, or one that cannot be used.
        """
        if self.template is not None:
            tokenizer.chat_template = _read(self.template)
            try:
                tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
            except jinja2.TemplateSyntaxError as error:
                raise UserError(f"chat.template={self.template}, line {error.lineno}: {error.message}") from None
            except Exception:  # a template may refuse this by any error of its own; the renderer tries it properly
                pass
        return ChatRenderer(tokenizer, enable_thinking=self.enable_thinking, stop_ids=stop_ids)


def _read(template: str) -> str:
    folder = resources.files("envace.chat") / "templates"
    shipped = {file.name.removesuffix(".jinja"): file for file in folder.iterdir()}
    try:
        return shipped.get(template, Path(template)).read_text(encoding="utf-8")
    except OSError:
        raise UserError(f"chat.template={template}: no such file; shipped ones: {', '.join(sorted(shipped))}") from None
    except UnicodeDecodeError:
        raise UserError(f"chat.template={template}: not UTF-8 text") from None
