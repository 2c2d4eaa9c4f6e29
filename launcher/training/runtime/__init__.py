"""Services of the training process: record, watchdog, output, rendezvous."""
