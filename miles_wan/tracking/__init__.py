"""What a run tells people: metric names, sinks, progress, videos, the curve, the summary and the log format.

In: numbers, frames and phases of the driver. Out: files in the output folder and lines on the terminal. It knows nothing
of Ray, SGLang or models. Import from the modules: the launcher wants the log format without matplotlib or torch.
"""
