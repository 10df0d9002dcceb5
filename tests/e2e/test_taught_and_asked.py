"""What a model was taught is what it is asked: training and a server write the same ids for the same conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.text.tokenizer_files import TEMPLATE
from finetune.data.encode import Encoded
from finetune.data.samples import Chat
from finetune.data.templates import TEMPLATES
from finetune.data.tokenizer import copy_tokenizer
from finetune.data.workers import Encoding, encoder_of
from serve.text.tokenizer import load_tokenizer
from serve.v1 import tokenizer_pb2, types_pb2
from tests.serve.rpc.running import serving
from tests.support.tokenizers import FOLDERS, make_folder, write

TURNS = (("user", "Größe? "), ("assistant", " 42.\n"), ("user", "Hello world"), ("assistant", "The quick brown fox"))

ENCLOSED = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' %}A:
{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}

{% else %}{{ message.role | upper }}:
{{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}A:
{% endif %}"""


@pytest.mark.parametrize("name", FOLDERS)
async def test_a_server_asks_with_the_ids_that_training_laid_out(name: str, tmp_path: Path) -> None:
    taught = tmp_path / "taught"
    copy_tokenizer(make_folder(name, tmp_path), taught, "tokenizer.path")
    for source in (*TEMPLATES.values(), ENCLOSED):
        (taught / TEMPLATE).write_text(source)
        made = taught_ids(taught, source)
        assert made.learned is not None
        first = made.learned.tolist().index(1)
        assert made.ids[:first].tolist() == await asked_ids(taught), source
        assert made.learned[first:].all(), "all that follows is the answer"


def taught_ids(folder: Path, template: str) -> Encoded:
    """The conversation as it is trained on, its last answer to be learned."""
    encoding = Encoding(
        tokenizer=folder, template=template, template_place="", now="2026-01-02", train_on="last", roles=("assistant",)
    )
    messages = tuple({"role": role, "content": content} for role, content in TURNS)
    (made,) = encoder_of(encoding)[0].encode([Chat(messages, (True,) * len(messages))])
    assert isinstance(made, Encoded), made
    return made


async def asked_ids(folder: Path) -> list[int]:
    """What a server makes of all but the last answer, when these files lie beside a model of another family."""
    write(folder, "config.json", {"model_type": "llama"})
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role=role, content=content) for role, content in TURNS[:-1]])
    async with serving(text=load_tokenizer(folder)) as server:
        answer = await server.tokenizer.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat))
    (folder / "config.json").unlink()
    return list(answer.token_ids)
