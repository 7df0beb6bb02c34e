"""A network task whose lower level has many minima that differ in upper value."""
