"""shared_devices."""
