"""The chat template of a run: the tokenizer's own, one of a file or, for tokenizers that bring none, one of these by name.

Each of these ends the assistant's turns in a token that can be learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from checkpoint import CheckpointError
from checkpoint.disk.folder import Folder
from checkpoint.text.tokenizer_files import MAX_TEMPLATE_BYTES, default_template, read_tokenizer_config
from finetune.errors import ConfigError

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{{- eos_token if message['role'] == 'assistant' and eos_token != '<|im_end|>' }}
{{- '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""

PLAIN = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- 'Assistant: ' + message['content'] + eos_token + '\\n' }}
{%- elif message['role'] == 'user' -%}
{{- 'User: ' + message['content'] + '\\n' }}
{%- elif message['role'] == 'tool' -%}
{{- 'Tool: ' + message['content'] + '\\n' }}
{%- else -%}
{{- message['content'] + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' }}{%- endif -%}
"""

INSTRUCT = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}
{%- elif message['role'] == 'user' -%}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'tool' -%}
{{- '### Input:\\n' + message['content'] + '\\n\\n' }}
{%- else -%}
{{- message['content'] + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### Response:\\n' }}{%- endif -%}
"""

TEMPLATES: Final[Mapping[str, str]] = {"chatml": CHATML, "plain": PLAIN, "instruct": INSTRUCT}


def named_template(named: str) -> tuple[str, str]:
    """The template that ``data.chat_template`` names, and where it is from.

    Raises:
        ConfigError: the file cannot be read, or is larger than a server reads.
    """
    if named in TEMPLATES:
        return TEMPLATES[named], f"data.chat_template {named}"
    path = Path(named).expanduser()
    try:
        source = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(TEMPLATES)
        raise ConfigError(f"data.chat_template: {path} cannot be read: {error}; name a Jinja file or one of {names}") from error
    if (size := len(source.encode())) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"data.chat_template: {path} has {size} bytes; a template has at most {MAX_TEMPLATE_BYTES}")
    return source, str(path)


def own_template(folder: Path) -> tuple[str, str] | None:
    """The template of a tokenizer's folder, which a server takes as well, and its file; ``None`` if there is none.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    files = Folder(folder)
    try:
        found = default_template(files, read_tokenizer_config(files))
    except CheckpointError as error:
        raise ConfigError(f"{folder / error.file}: {error.rule}") from error
    return None if found is None else (found[0], str(folder / found[1]))
