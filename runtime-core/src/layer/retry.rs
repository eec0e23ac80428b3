//! Another attempt for what may be attempted twice.

use std::future::Future;
use std::sync::Arc;

use crate::error::Result;
use crate::layer::{Around, Layer, Operation, Wrapped};
use crate::retry::{Idempotency, Retrier};
use crate::runtime::Runtime;

/// Repeats idempotent operations whose error is [`Retry::Temporary`](crate::Retry::Temporary). A program is never
/// started twice, and what consumes a stream or creates a box is not repeated either.
#[derive(Debug, Clone)]
pub struct RetryLayer {
    retrier: Retrier,
}

impl RetryLayer {
    /// Repeats as `retrier` says; its budget is shared by all boxes of the layer.
    pub fn new(retrier: Retrier) -> Self {
        Self { retrier }
    }
}

impl Layer for RetryLayer {
    fn wrap(&self, inner: Arc<dyn Runtime>) -> Arc<dyn Runtime> {
        Arc::new(Wrapped {
            inner,
            around: self.clone(),
        })
    }
}

impl Around for RetryLayer {
    async fn call<T: Send, F, Fut>(&self, operation: Operation, mut attempt: F) -> Result<T>
    where
        F: FnMut() -> Fut + Send,
        Fut: Future<Output = Result<T>> + Send,
    {
        if !operation.is_idempotent() {
            return attempt().await;
        }
        self.retrier
            .run(operation.as_str(), Idempotency::Safe, |_| attempt())
            .await
    }
}
