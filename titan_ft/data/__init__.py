# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""The small real text corpus and the tokenizer that ship with the package."""
