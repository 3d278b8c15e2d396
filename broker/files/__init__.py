"""Files of the broker in the run directory and at the rendezvous."""
