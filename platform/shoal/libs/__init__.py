"""What is built on the platform: libraries that use it as a user's package does. The platform imports none of them."""
