"""One FSDP2 worker: sharding, micro-batches, optimizer, checkpoint. Runs under any launcher that gives rank and rendezvous."""
