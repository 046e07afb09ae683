"""The host of the store is lost: who decides where the job continues, and how a rank finds out."""
