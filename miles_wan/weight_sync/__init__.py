"""Adapters from the training ranks into the engines, verified: what is sent, how it travels, whether it arrived."""

from miles_wan.weight_sync.transport import choose_transport, device_numbers, sharing_ranks
from miles_wan.weight_sync.update import make_update
from miles_wan.weight_sync.verify import verify_reports

__all__ = ["choose_transport", "device_numbers", "make_update", "sharing_ranks", "verify_reports"]
