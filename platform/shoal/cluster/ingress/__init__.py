"""Ray Serve's HAProxy: its environment and configuration."""
