"""How fast: devices, one decode step and one prefill op by op, and serving."""
