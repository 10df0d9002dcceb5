"""Chat templates for tokenizers that bring none, by name. Each ends the assistant's turns in a token that can be learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
