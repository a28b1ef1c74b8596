#!/usr/bin/env python3
"""Train a Wan2.2-T2V-A14B model (two experts) with Flow-GRPO on this machine; ``--help`` lists the flags."""

import sys

from miles_wan.cluster.launch import main

if __name__ == "__main__":
    sys.exit(main(recipe="wan22_t2v_a14b"))
