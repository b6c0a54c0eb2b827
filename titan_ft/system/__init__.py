# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Processes, signals, threads, network addresses and files of the operating system. Imports no other room."""
