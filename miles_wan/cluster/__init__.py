"""Everything that is Ray: the local cluster, the job, placement, actors, and the driver that hands them to the loop."""
