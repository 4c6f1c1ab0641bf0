"""What a training tells. Begin with `reporters`, which write lines and metrics; plots, output, utilization beside."""
