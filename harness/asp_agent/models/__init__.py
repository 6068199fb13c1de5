"""Model drivers: one file each; an SDK is imported only when its driver is used."""
