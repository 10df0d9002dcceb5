"""transformers' way from a folder to a first token, in a process of its own: seconds of each part, as JSON.

python load_peer.py FOLDER DTYPE
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.models.gpt_neox import modeling_gpt_neox  # noqa: F401  # its seconds belong to the imports


def main(folder: str, dtype: str) -> None:
    imported = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
    loaded = time.perf_counter()
    with torch.inference_mode():
        ids = torch.arange(8)[None]
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
    done = time.perf_counter()
    print(json.dumps({"read": loaded - imported, "first token": done - loaded}))


if __name__ == "__main__":
    main(*sys.argv[1:])
