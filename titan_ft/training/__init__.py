# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The parts beside torchtitan's trainer: the worker, the train spec, loaders, checkpoints, the
step's log.
"""
