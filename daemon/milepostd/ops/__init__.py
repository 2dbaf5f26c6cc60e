"""Operating the daemon: settings, log, metrics, HTTP, supervision, placement, fault points."""
