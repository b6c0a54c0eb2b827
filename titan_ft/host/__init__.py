# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The code that depends on torchtitan's release, and the patches of the libraries that titan_ft
runs on.
"""
