"""Device state: tokens and lengths, caches, sampling parameters, and host-device copies."""
