"""Rollouts: requests in, videos with their trajectories out. ``base`` says what an engine is; ``sglang`` is the one that
owns an SGLang server. Importing this package is cheap: the engine's own processes do it too.
"""
