# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Stand in for torch if only a group's store needs it: an import of torch takes more than a second
of CPU.
"""
