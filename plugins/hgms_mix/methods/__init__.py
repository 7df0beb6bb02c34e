"""Methods that learn a mixture, or choose rows."""
