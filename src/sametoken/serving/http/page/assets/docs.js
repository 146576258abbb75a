"use strict";
const isDark = window.matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.classList.toggle("dark-mode", isDark);
// No validator: it is another site's.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#api", deepLinking: true, defaultModelsExpandDepth: 0, validatorUrl: null });
