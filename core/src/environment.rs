//! Cluster environments: who am I among the processes of a job.
