# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""Train the packaged tokenizer on the packaged training text. Deterministic: it writes the same
files each time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from titan_ft.data.assets import TOKENIZER, TRAIN_TEXT
from titan_ft.data.documents import read_text, split_documents

# The vocabulary of torchtitan's llama3 debug model, whose embedding has exactly this many rows.
VOCAB_SIZE = 2048
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"


def train(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # As Llama 3 does: words with their leading blank, numbers in threes, punctuation, runs of
    # blanks; then bytes.
    words = Regex(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(split_documents(read_text(TRAIN_TEXT)), trainer)

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=TOKENIZER, help="folder to write (default: the package's own)"
    )
    train(parser.parse_args().out)


if __name__ == "__main__":
    main()
