"""The check before anything starts: ``check`` reads a configuration and everything it names."""

from miles_wan.doctor.check import Report, check

__all__ = ["Report", "check"]
