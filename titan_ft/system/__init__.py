# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The operating system: processes, signals, threads, addresses, files. Imports no other room."""
