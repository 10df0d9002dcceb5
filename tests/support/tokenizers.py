"""Small tokenizer folders of the kinds that real checkpoints have, trained on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def read_config(path):\n    with open(path) as file:\n        return json.load(file)\n",
    "Größe, naïve café, Ελληνικά, 日本語のテキスト, русский язык, 한국어 문장",
    "smile 😀 family 👩‍👩‍👧 flag 🇩🇪 accents e\u0301 a\u0308 tabs\t\tand  double  spaces",
    "numbers 0123456789 and 3.14159, it's we'll they've I'm; (brackets) [more] {still}",
]

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and trailing  ",
    "Hello world",
    "<|endoftext|>after",
    "before<|endoftext|> <|im_start|>user\nhi<|im_end|>",
    "<s>[INST] hi [/INST]</s>",
    "\x00\x01\x7f\u200b\ufeff",
    "日本語" * 20,
    "a" * 300,
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🏳️‍🌈 \U0001f9d1\U0001f3fd‍\U0001f680",
    "line\r\nbreak\rand\n\n\nmany",
]


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def train_byte_level(normalizer: Any = None, special: tuple[str, ...] = ("<|endoftext|>",), size: int = 420) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def gpt_neox(folder: Path) -> None:
    """As the project's own training writes it: the file as it is."""
    backend = train_byte_level(normalizers.NFC(), ("<|endoftext|>", "<|padding|>"))
    backend.add_tokens([AddedToken("  ", normalized=True), AddedToken("    ", normalized=True)])
    backend.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    write(folder, "config.json", {"model_type": "gpt_neox"})


def gpt_neox_class(folder: Path) -> None:
    """Pythia: the class is named, and rebuilds what the file says."""
    backend = train_byte_level(None)
    backend.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "GPTNeoXTokenizerFast", "add_prefix_space": False})
    write(folder, "config.json", {"model_type": "gpt_neox"})


def gpt_neox_silent(folder: Path) -> None:
    """No tokenizer_config.json at all."""
    train_byte_level(None).save(str(folder / "tokenizer.json"))
    write(folder, "config.json", {"model_type": "gpt_neox"})


def gpt2_files(folder: Path) -> None:
    """vocab.json and merges.txt alone, as in 2019."""
    folder.mkdir(parents=True, exist_ok=True)
    train_byte_level().model.save(str(folder))
    write(folder, "config.json", {"model_type": "gpt2"})


def opt(folder: Path) -> None:
    """GPT-2's vocabulary with a BOS token in front, by configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    train_byte_level(special=("<s>", "<pad>", "</s>", "<unk>")).model.save(str(folder))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
    }
    write(folder, "tokenizer_config.json", config)
    write(folder, "config.json", {"model_type": "opt"})


def gptj_prefix_space(folder: Path) -> None:
    train_byte_level().save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True})
    write(folder, "config.json", {"model_type": "gptj"})


def qwen2(folder: Path) -> None:
    """The class is used whatever the file names; declared tokens come from the configuration."""
    backend = train_byte_level(None, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    backend.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    write(folder, "config.json", {"model_type": "qwen2"})


def _sentencepiece_like(bos: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=[], limit_alphabet=60, show_progress=False
    )
    split = Tokenizer(models.BPE(unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    split.train_from_iterator(CORPUS, trainer)
    learned = json.loads(split.to_str())["model"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*byte_tokens, *sorted(learned["vocab"], key=learned["vocab"].get)]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in learned["merges"]]
    backend.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(steps)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return backend


def llama(folder: Path) -> None:
    _sentencepiece_like(bos=True).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", **names})
    write(folder, "config.json", {"model_type": "llama"})


def mistral(folder: Path) -> None:
    """BOS by the file's post-processor; add_bos_token in the configuration counts for nothing."""
    _sentencepiece_like(bos=False).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast", **names})
    write(folder, "config.json", {"model_type": "mistral"})


def mistral_prepend(folder: Path) -> None:
    """As Mistral's and Phi-3's first files: a space before every stretch of text, where the class puts one before the first."""
    backend = _sentencepiece_like(bos=False)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", **names})
    write(folder, "config.json", {"model_type": "mistral"})


def llama3(folder: Path) -> None:
    """Byte-level, with a BOS token by the post-processor."""
    backend = train_byte_level(None, ("<|begin_of_text|>", "<|end_of_text|>"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B", special_tokens=[("<|begin_of_text|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    write(folder, "config.json", {"model_type": "llama"})


def phi(folder: Path) -> None:
    """CodeGen's class, with tokens that only the configuration declares."""
    backend = train_byte_level()
    size = backend.get_vocab_size()
    backend.save(str(folder / "tokenizer.json"))
    declared = {
        str(size): {
            "content": "   ",
            "lstrip": False,
            "rstrip": False,
            "normalized": True,
            "single_word": False,
            "special": False,
        },
        str(size + 1): {
            "content": "<|im_end|>",
            "lstrip": False,
            "rstrip": True,
            "normalized": False,
            "single_word": False,
            "special": True,
        },
    }
    write(folder, "tokenizer_config.json", {"tokenizer_class": "CodeGenTokenizer", "added_tokens_decoder": declared})
    write(folder, "config.json", {"model_type": "phi"})


def unigram(folder: Path) -> None:
    """A decoder of another kind."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    write(folder, "config.json", {"model_type": "llama"})


def wordpiece(folder: Path) -> None:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]"})
    write(folder, "config.json", {"model_type": "llama"})


FOLDERS: dict[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (
        gpt_neox,
        gpt_neox_class,
        gpt_neox_silent,
        gpt2_files,
        opt,
        gptj_prefix_space,
        qwen2,
        llama,
        mistral,
        mistral_prepend,
        llama3,
        phi,
        unigram,
        wordpiece,
    )
}


def make_folder(name: str, root: Path) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    FOLDERS[name](folder)
    return folder
