#!/usr/bin/env python3
"""Train a Wan2.2 model (TI2V-5B, T2V-A14B, I2V-A14B) on video-caption data on this machine; ``--help`` lists the flags."""

import sys

from miles_wan.supervised.launch import main

if __name__ == "__main__":
    sys.exit(main())
