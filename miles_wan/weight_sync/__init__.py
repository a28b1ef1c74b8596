"""Adapters from the training ranks into the engines, verified: what is sent, how it travels, whether it arrived."""

from miles_wan.weight_sync.transport import choose_transport, physical_devices
from miles_wan.weight_sync.update import make_update
from miles_wan.weight_sync.verify import verify_reports

__all__ = ["choose_transport", "make_update", "physical_devices", "verify_reports"]
